"""The kernel of leyden: contracts, the catalogue of techniques, training. The command line is `plugins.cli`.

Importing this package imports neither torch nor lightning, so that cheap commands stay cheap.
"""

__version__ = "0.1.0"

API_VERSION = "1.4"
"""Version of what techniques rely on: `core.technique`, `core.contracts`, the entry points. A change that a
technique may have to follow raises the first number, an addition the second."""

from core import user_folders  # noqa: E402

user_folders.install()
