"""Symbolic dimensions: integer polynomials over named atoms.

Atoms are the runtime axes `B`, `S` (Legacy batch and padded length), `T`, `n`, `q` (packed tokens, requests,
tokens per request), configuration paths such as `config.num_attention_heads`, and wildcards `?k` for a size
that is not known. A wildcard equals anything; use `same` to compare, never `==`, where wildcards may occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

__all__ = ["Dim", "const", "fresh", "product", "same"]

_Monomial = tuple[tuple[str, int], ...]
_counter = count()


@dataclass(frozen=True)
class Dim:
    """A polynomial: sorted ((monomial, coefficient), ...); the empty tuple is 0."""

    terms: tuple[tuple[_Monomial, int], ...]

    @staticmethod
    def of(terms: Mapping[_Monomial, int]) -> Dim:
        return Dim(tuple(sorted((m, c) for m, c in terms.items() if c)))

    @staticmethod
    def atom(name: str) -> Dim:
        return Dim(((((name, 1),), 1),))

    @property
    def value(self) -> int | None:
        """The integer, when the polynomial is one."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and self.terms[0][0] == ():
            return self.terms[0][1]
        return None

    @property
    def atoms(self) -> frozenset[str]:
        return frozenset(name for mono, _ in self.terms for name, _ in mono)

    @property
    def wild(self) -> bool:
        return any("?" in a for a in self.atoms)

    def __add__(self, other: Dim) -> Dim:
        out = dict(self.terms)
        for mono, coef in other.terms:
            out[mono] = out.get(mono, 0) + coef
        return Dim.of(out)

    def __neg__(self) -> Dim:
        return Dim(tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: Dim) -> Dim:
        return self + (-other)

    def __mul__(self, other: Dim) -> Dim:
        out: dict[_Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                powers = dict(m1)
                for name, power in m2:
                    powers[name] = powers.get(name, 0) + power
                mono = tuple(sorted(powers.items()))
                out[mono] = out.get(mono, 0) + c1 * c2
        return Dim.of(out)

    def divide(self, other: Dim) -> Dim | None:
        """Exact quotient by a monomial, else None."""
        if len(other.terms) != 1:
            return const(1) if self == other else None
        (mono, coef) = other.terms[0]
        out: dict[_Monomial, int] = {}
        for m, c in self.terms:
            powers = dict(m)
            for name, power in mono:
                powers[name] = powers.get(name, 0) - power
            if c % coef or any(p < 0 for p in powers.values()):
                return None
            out[tuple(sorted((n, p) for n, p in powers.items() if p))] = c // coef
        return Dim.of(out)

    def evaluate(self, env: Mapping[str, int]) -> int | None:
        """The integer under `env`, or None when an atom is missing."""
        total = 0
        for mono, coef in self.terms:
            term = coef
            for name, power in mono:
                if name not in env:
                    return None
                term *= env[name] ** power
            total += term
        return total

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for mono, coef in self.terms:
            names = [n if p == 1 else f"{n}**{p}" for n, p in mono]
            if coef != 1 or not names:
                names.insert(0, str(coef))
            parts.append("*".join(names))
        return " + ".join(parts)


def const(value: int) -> Dim:
    """The constant polynomial."""
    return Dim.of({(): value})


def fresh() -> Dim:
    """A size that is not known."""
    return Dim.atom(f"?{next(_counter)}")


def product(dims: tuple[Dim, ...] | list[Dim]) -> Dim:
    out = const(1)
    for dim in dims:
        out = out * dim
    return out


def same(a: Dim, b: Dim) -> bool:
    """Equal, as far as can be known."""
    return a == b or a.wild or b.wild
