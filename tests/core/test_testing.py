"""The former name of the conformance kit works for one version of the API, with a warning."""

import os
import subprocess
import sys

import pytest

import conformance


@pytest.mark.parametrize("name", conformance.__all__)
def test_every_public_name_leads_to_the_kit_and_says_so(name):
    import core.testing

    with pytest.warns(
        DeprecationWarning, match=rf"^core\.testing\.{name} is deprecated.*: use conformance\.{name}\.$"
    ):
        assert getattr(core.testing, name) is getattr(conformance, name)


def test_it_has_no_other_names():
    import core.testing

    with pytest.raises(AttributeError, match="no attribute 'case'"):
        core.testing.case  # noqa: B018


def test_the_plugin_can_be_named_where_plugins_are_not_loaded_by_themselves(tmp_path):
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "core.testing.pytest_plugin",
            "--leyden-package",
            "absent-package",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "absent-package" in done.stdout + done.stderr
    assert "unrecognized arguments" not in done.stderr
