"""Extracts the text of PDF files in a process of its own: `python pdf_process.py SECONDS BYTES PAGES CHARACTERS`.

Reads paths from standard input, each a line of JSON, and answers each with a line of JSON: `pages`, or `reason` and
`details`. The parser is a large library in C++ that reads whatever the web holds: if it crashes, hangs or takes all
memory, this process dies, and its parent goes on. Imports nothing of leyden, so that it starts within 0.1 s.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

BROKEN, ENCRYPTED = "broken PDF", "an encrypted PDF"
MANY_PAGES, LONG = "a PDF of more than max_pages", "a PDF of more than max_text_bytes"

_PASSWORD_ERRORS = ("password", "security")


def main() -> None:
    """Answers until standard input ends."""
    seconds, memory, pages, characters = map(int, sys.argv[1:5])
    import pypdfium2

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + seconds + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        answer = extract(pypdfium2, json.loads(line), pages, characters)
        print(json.dumps(answer), flush=True)


def extract(pypdfium2: Any, path: str, most_pages: int, most_characters: int) -> dict[str, Any]:
    """Returns the texts of a file's pages, or why there are none."""
    try:
        with open(path, "rb") as stream, pypdfium2.PdfDocument(stream) as document:
            if len(document) > most_pages:
                return {"reason": MANY_PAGES, "details": f"{len(document):,}"}
            texts, size = [], 0
            for number in range(len(document)):
                page = document[number]
                content = page.get_textpage()
                texts.append(content.get_text_bounded(errors="replace"))
                content.close()
                page.close()
                size += len(texts[-1])
                if size > most_characters:
                    return {"reason": LONG, "details": f"page {number + 1:,}"}
            return {"pages": texts}
    except pypdfium2.PdfiumError as error:
        hidden = any(word in str(error).lower() for word in _PASSWORD_ERRORS)
        return {"reason": ENCRYPTED if hidden else BROKEN, "details": str(error)[:200]}
    except (OSError, MemoryError) as error:
        return {"reason": BROKEN, "details": type(error).__name__}


if __name__ == "__main__":
    main()
