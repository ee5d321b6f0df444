"""What a reference kernel may say instead of a result. All three name the operator."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MissingKernel", "OperatorRuleViolation", "RuleHit", "UnmodelledCall"]


@dataclass(frozen=True)
class RuleHit:
    """A rule that a call breaks: its id and KV code, the profile, where the rule comes from, what was found.

    `silent`: the device is not known to refuse the call, it goes on and computes something else.
    """

    rule: str
    code: str
    profile: str
    op: str
    source: str
    message: str
    silent: bool = False

    def __str__(self) -> str:
        return f"{self.op}: {self.message} [{self.rule}, profile {self.profile}; source: {self.source}]"


class OperatorRuleViolation(RuntimeError):  # noqa: N818 (says what happened)
    """The device would refuse this call, or compute something else than asked for.

    `hits` holds every rule broken by the call, the first one decides `rule`, `code`, `source`, `message`.
    """

    def __init__(self, hits: tuple[RuleHit, ...]) -> None:
        self.hits = hits
        first = hits[0]
        self.op, self.rule, self.code = first.op, first.rule, first.code
        self.source, self.message = first.source, first.message
        super().__init__("\n".join(str(h) for h in hits))


class UnmodelledCall(NotImplementedError):  # noqa: N818
    """The call may be right, but the reference kernel does not model this argument or combination."""

    def __init__(self, op: str, what: str) -> None:
        self.op, self.what = op, what
        super().__init__(f"{op}: the CPU reference does not model {what}; this call was not verified")


class MissingKernel(NotImplementedError):  # noqa: N818
    """The operator exists in this release, but kvskill has no reference kernel for it."""

    def __init__(self, op: str) -> None:
        self.op = op
        super().__init__(f"{op}: kvskill has no CPU reference kernel for this operator; nothing was computed")
