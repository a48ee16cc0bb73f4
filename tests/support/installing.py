"""Packages are installed as anybody installs them, into a folder of their own."""

import shutil
import subprocess
import sys


def copied(folder, *packages):
    """Copies packages into a folder, without what builds leave behind; returns it."""
    for package in packages:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(package, folder / package.name, ignore=ignored)
    return folder


def install(target, *packages):
    """Installs packages with pip, without looking anything up; returns the folder."""
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", target]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *packages], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target
