"""Scripts that print the figures of the docs. Their configs name classes of theirs."""

import os

os.environ.setdefault("LEYDEN_TRUST", "tests,conformance")
