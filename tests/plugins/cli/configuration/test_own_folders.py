"""A project with folders of its own that are named like ours: its modules are found, ours are not replaced."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from core import user_folders
from core.__main__ import main
from plugins.cli.configuration import user_modules
from tests.conftest import HOUSE, TINY

FILES = {
    "callbacks/mine.py": """
        from callbacks.gradient_clip import GradientClip
        from callbacks.helper import SAID
        from core.technique import technique
        from lightning.pytorch import Callback

        class Mine(Callback):
            def on_fit_end(self, trainer, pl_module):
                names = [type(part).__module__ for part in (pl_module.network, trainer.datamodule)]
                with open(f"rank-{trainer.global_rank}.txt", "w") as file:
                    print(SAID, GradientClip.__name__, *names, file=file)
        """,
    "callbacks/helper.py": "SAID = 'said'\ndef spawned(queue): queue.put(SAID)\n",
    "callbacks/gradient_clip.py": "raise SystemExit('this file replaced ours')\nclass GradientClip: pass\n",
    "plugins/networks/mine.py": "from plugins.networks.gpt import GPT\nclass Mine(GPT):\n    'Mine.'\n",
    "datamodules/__init__.py": "raise SystemExit('this file replaced ours')\n",
    "datamodules/mine.py": "from tests.support.toy import ToyData\nclass Mine(ToyData):\n    'Mine.'\n",
    "toolkit.py": "class Mine: pass\n",
    "own.py": "from toolkit import Mine\n",
    "own_too.py": "import toolkit\nMine = toolkit.Mine\n",
    "configs/helper.py": "def flat(step): return 1.0\n",
    "train.py": """
        import sys
        from callbacks import helper  # before leyden is imported
        from core.__main__ import main

        if __name__ == "__main__":
            sys.exit(main(["fit", "--config", "configs/mine.yaml", *sys.argv[1:]]))
        """,
    "spawn.py": """
        import multiprocessing
        from callbacks.helper import spawned  # before leyden is imported
        from importlib.util import find_spec
        import core

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            process = context.Process(target=spawned, args=[queue])
            process.start()
            print(queue.get(), find_spec("callbacks.gradient_clip").origin)
            process.join()
        """,
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder like a user's, the working directory."""
    for name, source in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in source.splitlines()))
    model = {
        **TINY["model"],
        "network": {**TINY["model"]["network"], "class_path": "plugins.networks.mine.Mine"},
    }
    trainer = {**TINY["trainer"], "callbacks": [{"class_path": "callbacks.mine.Mine"}, "GradientClip"]}
    values = {**TINY, "trainer": trainer, "model": model, "data": {"class_path": "datamodules.mine.Mine"}}
    (tmp_path / "project" / "configs" / "mine.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path / "project")
    before, modules = list(sys.path), set(sys.modules)
    yield tmp_path / "project"
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in user_folders.PACKAGES and not user_modules.is_module(
            HOUSE.joinpath(*name.split("."))
        ):
            del sys.modules[name]


def check(*options):
    return main(["check", "--config", *map(str, options)])


@pytest.mark.slow  # two imports of everything
def test_two_ranks_of_a_train_script_find_the_projects_modules_and_ours(project):
    options = ["--trainer.devices=2", "--trainer.strategy=DDP", "--trainer.max_steps=4"]
    done = subprocess.run(
        [sys.executable, "train.py", *options], cwd=project, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    written = {(project / f"rank-{rank}.txt").read_text() for rank in range(2)}
    assert written == {"said GradientClip plugins.networks.mine datamodules.mine\n"}


def test_a_spawned_process_finds_them_too(project):
    done = subprocess.run([sys.executable, "spawn.py"], cwd=project, capture_output=True, text=True)
    assert done.stdout == f"said {HOUSE / 'callbacks' / 'gradient_clip.py'}\n", done.stderr


def test_a_project_is_checked_from_its_folder_and_from_elsewhere(project, monkeypatch, capsys, caplog):
    assert check("configs/mine.yaml") == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    rows = [line.split()[0:4] for line in shown.out.splitlines() if line.startswith("Mine ")]
    assert rows == [["Mine", "-", "(not", "a"]] * 3  # not of leyden, though it lies in `callbacks`
    assert "is not used: callbacks.gradient_clip.GradientClip is leyden's" in caplog.text
    monkeypatch.chdir(project.parent)
    assert check("project/configs/mine.yaml") == 0, capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize("package", [False, True], ids=["a folder", "a package"])
def test_the_project_may_have_packages_of_the_names_of_our_kernel_and_kit(package, project):
    """Of `python -m core` Python starts the project's own `core`, if it is a package: the program `leyden` does not."""
    source = "from lightning.pytorch import Callback\nclass {}(Callback):\n    'Own.'\n"
    (project / "toolkit.py").unlink()
    for folder in ("core", "toolkit", "conformance"):
        (project / folder).mkdir()
        (project / folder / "mine.py").write_text(source.format(folder.capitalize()))
        if package:
            (project / folder / "__init__.py").write_text("raise SystemExit('this file replaced ours')\n")
            (project / folder / "errors.py").write_text("raise SystemExit('this file replaced ours')\n")
    callbacks = [f"{folder}.mine.{folder.capitalize()}" for folder in ("core", "toolkit", "conformance")]
    own = {"trainer": {"callbacks+": [{"class_path": name} for name in callbacks]}}
    (project / "own.yaml").write_text(yaml.safe_dump(own))
    words = ["check", "--config=configs/mine.yaml", "--config=own.yaml"]
    program = [Path(sys.executable).with_name("leyden")] if package else [sys.executable, "-m", "core"]
    done = subprocess.run([*program, *words], cwd=project, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert {"Core", "Toolkit", "Conformance"} <= {line.partition(" ")[0] for line in done.stdout.splitlines()}


def test_a_module_beside_a_config_that_lies_elsewhere_is_found(project, capsys):
    (project.parent / "other").mkdir()
    (project.parent / "other" / "leyden_lone.py").write_text(
        "from lightning.pytorch import Callback\nclass Lone(Callback): ''\n"
    )
    path = project.parent / "other" / "own.yaml"
    path.write_text("trainer:\n  callbacks+:\n    - class_path: leyden_lone.Lone\n")
    assert check("configs/mine.yaml", "--config", path) == 0, capsys.readouterr().err


HOSTILE = {
    "a class": [{"class_path": "callbacks.mine.Mine"}],
    "a text": ["callbacks.mine.Mine"],
    "a text of JSON": ['{"class_path": "callbacks.mine.Mine"}'],
}


@pytest.mark.parametrize("callbacks", HOSTILE.values(), ids=HOSTILE)
def test_a_config_from_elsewhere_does_not_import_the_projects_modules(callbacks, project, capsys):
    (project / "downloads").mkdir()
    trainer = {**TINY["trainer"], "callbacks": callbacks}
    (project / "downloads" / "evil.yaml").write_text(yaml.safe_dump({**TINY, "trainer": trainer}))
    assert check("downloads/evil.yaml") == 2
    message = capsys.readouterr().err
    assert "evil.yaml" in message
    is_text = callbacks == HOSTILE["a text of JSON"]
    assert ("--trust callbacks.mine" in message) != is_text
    assert "callbacks.mine" not in sys.modules
    # trust in one module of a folder is no trust in another
    assert check("downloads/evil.yaml", "--trust=callbacks.helper") == 2
    assert "callbacks.mine" not in sys.modules
    assert check("downloads/evil.yaml", "--trust=callbacks") == 2 * is_text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "callbacks.mien.Mine",
            "there is no module 'callbacks.mien'. Did you mean mine?\nA file callbacks/mien.py",
        ),
        ("callbacks.mine.Mien", "callbacks.mine has no 'Mien'. Did you mean Mine?"),
        ("callbacks.gradient_clip.Other", "callbacks/gradient_clip.py is hidden by our module"),
        ("datamodules.Mine", "datamodules/__init__.py is hidden by our module"),
        (
            "toolkit.Mine",
            "toolkit has no 'Mine'.\n{}/toolkit.py is hidden by our module of that name: move Mine into",
        ),
        ("own.Mine", "/toolkit.py is hidden by our module of that name: move what is imported into"),
        ("own_too.Mine", "/toolkit.py is hidden by our module of that name: move what is imported into"),
        ("configs.helper.flat", "flat is no"),
    ],
)
def test_mistakes_say_which_file_was_meant(name, expected, project, capsys):
    section = (
        {"data": {"class_path": name}}
        if name.startswith("datamodules")
        else {"trainer": {"callbacks+": [{"class_path": name}]}}
    )
    (project / "wrong.yaml").write_text(yaml.safe_dump(section))
    assert check("configs/mine.yaml", "--config", "wrong.yaml") == 2
    message = capsys.readouterr().err
    assert "wrong.yaml" in message
    assert expected.format(project) in message
    assert len(message.splitlines()) <= 10
