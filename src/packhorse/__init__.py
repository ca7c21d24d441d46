"""Packhorse answers questions about very long documents on the GPU a person already owns.

Importing the package imports no torch; docs/structure.md says what lives where.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
