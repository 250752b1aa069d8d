"""Rules. Functions of single elements, casts, and factories ``like`` a tensor."""

from ops.pointwise import cast, creation, elementwise, ternary

__all__ = ["cast", "creation", "elementwise", "ternary"]
