"""Conversion to the framework's paged interface, one small pass per kind of edit."""
