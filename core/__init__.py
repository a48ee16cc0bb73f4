"""The small core of leyden: contracts, the catalogue of techniques, the command line.

Importing this package imports neither torch nor lightning, so that cheap commands stay cheap.
"""

__version__ = "0.1.0"
