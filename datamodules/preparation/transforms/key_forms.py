"""Finds secret keys by the forms that their issuers give them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator

_KEY_FORMS = (
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}(?![A-Z0-9])",  # AWS, Google, Slack...
    r"AIza[\w-]{35}(?![\w-])",
    r"GOCSPX-[\w-]{28}(?![\w-])",
    r"ya29\.[\w-]{50,512}",
    r"gh[opsru]_[A-Za-z0-9]{36,251}",
    r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}",
    r"gl(?:pat|ptt|rt|dt|soat)-[\w-]{20,64}",
    r"xox[abeoprs]-(?:\d-)?[A-Za-z0-9]{8,32}-[A-Za-z0-9-]{10,128}",
    r"xapp-\d-[A-Z0-9]{8,16}-\d{8,16}-[a-f0-9]{32,128}",
    r"https://hooks\.slack\.com/services/T[A-Z0-9]{6,14}/B[A-Z0-9]{6,14}/[A-Za-z0-9]{20,32}",
    r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,128}",
    r"sk-(?:proj|svcacct|admin)-[\w-]{40,256}",
    r"sk-[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}",
    r"sk-ant-[\w-]{40,256}",
    r"hf_[A-Za-z]{34}(?![\w-])",
    r"npm_[A-Za-z0-9]{36}(?![\w-])",
    r"pypi-AgEI[\w-]{50,512}",
    r"SG\.[\w-]{22}\.[\w-]{43}(?![\w-])",
    r"SK[0-9a-f]{32}(?![0-9A-Za-z])",
    r"key-[0-9a-f]{32}(?![0-9A-Za-z])",
    r"do[opr]_v1_[a-f0-9]{64}",
    r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}",
    r"\d{8,10}:AA[\w-]{33}(?![\w-])",
    r"eyJ[\w-]{8,2048}+\.eyJ[\w-]{8,8192}+\.[\w-]{16,1024}+",
)
_KEY = re.compile(f"(?<![A-Za-z0-9_])(?:{'|'.join(_KEY_FORMS)})")
_KEY_HINT = re.compile(
    r"AKIA|ASIA|ABIA|ACCA|AIza|GOCSPX-|ya29\.|gh[opsru]_|github_pat_|gl(?:pat|ptt|rt|dt|soat)-|xox[abeoprs]-|xapp-"
    r"|hooks\.slack|k_(?:live|test)_|sk-|hf_|npm_|pypi-AgEI|SG\.|SK[0-9a-f]|key-[0-9a-f]|_v1_|shp(?:at|ca|pa|ss)_|:AA|eyJ"
)
_NAMED_KEY = re.compile(  # 40 characters of base64 that only their name tells from a hash
    r"(?:aws_?secret_?(?:access_?)?key\"?'?\s{0,3}(?::|=>?|:=)\s{0,3}[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"
    r"|AccountKey=([A-Za-z0-9+/]{86}==))",
    re.IGNORECASE,
)
_ARMOUR = re.compile(r"-----BEGIN (?:[A-Z]{2,10} ){0,2}PRIVATE KEY(?: BLOCK)?-----")
_ARMOUR_END = re.compile(
    r"(?:(?!-----)[A-Za-z0-9+/=\s\\:,.()@<>_-]){100,20000}+(?:-----END [A-Z ]{0,30}KEY(?: BLOCK)?-----)?"
)
_LEAST_DIFFERENT = 7
"""Characters that differ in a key; a placeholder such as `ghp_xxxx` has fewer behind its prefix."""


def keys(text: str) -> Iterator[tuple[int, int]]:
    """Yields where keys are: first private keys, then those with a name before them, then those of known forms."""
    if "PRIVATE KEY" in text:
        for begin in _ARMOUR.finditer(text):
            if end := _ARMOUR_END.match(text, begin.end()):
                yield begin.start(), begin.end() + len(end[0].rstrip())
    if "ey=" in text or "ecret" in text or "ECRET" in text:
        for match in _NAMED_KEY.finditer(text):
            group = 1 if match[1] else 2
            if _is_key(match[group]):
                yield match.span(group)
    if _KEY_HINT.search(text):
        for match in _KEY.finditer(text):
            if _is_key(match[0]):
                yield match.span()


def _is_key(key: str) -> bool:
    if key.startswith("eyJ"):
        head = key.partition(".")[0]
        try:
            return "alg" in json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
        except ValueError:  # also of Unicode
            return False
    return len(set(key[-16:])) >= _LEAST_DIFFERENT and "EXAMPLE" not in key
