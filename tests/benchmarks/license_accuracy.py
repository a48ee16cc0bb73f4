"""Prints how often the license found in the license files of installed packages is the one that their metadata name.

    python -m tests.benchmarks.license_accuracy

Packages with one license file and a classifier or License-Expression of one license are counted. "BSD License" of
classifiers stands for any BSD license.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions

from datamodules.preparation.readers.licenses import is_license_file, licenses_in

CLASSIFIERS = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
    "The Unlicense (Unlicense)": "Unlicense",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0",
}


def main() -> None:
    """Prints the figures, and the packages for which the two differ."""
    begin, right, others = time.process_time(), 0, []
    found = list(labelled())
    for name, label, licenses in found:
        if is_same(label, licenses):
            right += 1
        else:
            others.append(f"{name}: {label} in the metadata, {' AND '.join(licenses)} found")
    seconds = time.process_time() - begin
    print(f"{right} of {len(found)} packages, {seconds / len(found) * 1e3:.1f} ms each")
    print("\n".join(others))


def labelled() -> Iterator[tuple[str, str, list[str]]]:
    """Yields name, license in the metadata and licenses in the file of each package."""
    for package in distributions():
        label = label_of(package)
        files = [file for file in package.files or () if is_license_file(file.name) and "-info" in str(file)]
        if label and len(files) == 1 and (path := package.locate_file(files[0])).is_file():  # type: ignore[attr-defined]
            yield package.metadata["Name"], label, licenses_in(path.read_bytes())  # type: ignore[attr-defined]


def label_of(package: Distribution) -> str:
    """Returns the one license that the metadata name; empty if there are none or several."""
    if expression := package.metadata.get("License-Expression"):
        return "" if " " in expression or expression.startswith("LicenseRef-") else str(expression)
    lines = [line for line in package.metadata.get_all("Classifier") or () if line.startswith("License ::")]
    names = {line.split(" :: ")[-1] for line in lines} - {"OSI Approved"}
    return CLASSIFIERS.get(*names, "") if len(names) == 1 else ""


def is_same(label: str, licenses: list[str]) -> bool:
    """Returns whether the licenses found are the label alone."""
    return len(licenses) == 1 and (
        licenses[0] == label or (label == "BSD" and licenses[0].startswith("BSD-"))
    )


if __name__ == "__main__":
    main()
