"""The JSON schema of configs: what ships passes, mistakes do not, and jsonargparse agrees on plain values."""

import json
from copy import deepcopy
from typing import Literal, get_args, get_origin

import pytest
import yaml
from jsonschema import Draft7Validator

from core import catalog
from core.__main__ import main
from plugins.cli.configuration.config_files import compose, configs_folder
from plugins.cli.configuration.mistakes import _lay_over
from plugins.cli.configuration.signatures import accepts, class_types, parameters, sections
from plugins.cli.configuration.yaml_texts import parse_yaml, read_yaml
from plugins.commands.schema import build
from plugins.commands.schema_types import Builder, is_plain
from tests.conftest import TINY
from tests.support.mistakes import ARGUMENTS, FILES

SHIPPED = sorted(configs_folder().rglob("*.yaml"))
UNSEEN = {  # what only a run can know: values against each other, files, modules
    "--trainer.callbacks+=LossCurve",
    "--model.network.n_head=5",
    "--model.network.class_path=acme.Net",
    "--model.network.class_path=plugins.networks.gpt.GTP",
    "--data.batch_size=0",
    "--ckpt_path=gone.ckpt",
    "--ckpt_path=last",
    "--config=quickstrat",
}
UNSEEN_FILES = {
    "data:\n  init_args:\n    tokenizer:\n      class_path: BPE",  # which datamodule, another file says
    "base: quickstrat",
    "trainer:\n  max_steps: 1\n max_epochs: 2",  # no YAML, and a key twice: editors say so without a schema
    "trainer: {max_steps: 1}\ntrainer: {max_steps: 2}",
}


@pytest.fixture(scope="module")
def validator():
    schema = build()
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def problems(validator, values):
    return [f"{list(error.absolute_path)}: {error.message[:200]}" for error in validator.iter_errors(values)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_passes_as_written_and_as_composed(validator, path):
    assert problems(validator, read_yaml(path)[0]) == []
    assert problems(validator, compose([str(path)]).values) == []


def test_what_print_config_prints_passes(validator, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "quickstart", "--print_config"])
    values, _ = parse_yaml(capsys.readouterr().out, "printed")
    assert values["trainer"]["callbacks"]
    assert problems(validator, values) == []


@pytest.mark.parametrize("argument", [argument for argument, _, _ in ARGUMENTS if argument not in UNSEEN])
def test_a_wrong_argument_is_refused(validator, argument):
    values = deepcopy(compose(["quickstart"]).values)
    name, _, value = argument.removeprefix("--").partition("=")
    assert problems(validator, values) == []
    _lay_over(values, name, yaml.safe_load(value), {})
    assert not validator.is_valid(values)


@pytest.mark.parametrize("text", [text for text, _, _ in FILES[:-1] if text not in UNSEEN_FILES])
def test_a_mistake_in_a_file_is_refused(validator, text):
    assert not validator.is_valid(yaml.safe_load(text))


PASSES = [
    "",
    "trainer:",
    "base: defaults",
    "base: [defaults, ../mine.yaml]",
    "seed_everything: true",
    "trainer: {strategy: ddp, accelerator: gpu, devices: [0, 1], precision: bf16-mixed}",
    "trainer: {strategy: {class_path: DDPStrategy, init_args: {find_unused_parameters: true}}}",
    "trainer: {callbacks: LossCurve}",
    "trainer: {callbacks: [LossCurve, {class_path: TextSamples}]}",
    "trainer: {callbacks+: [LossCurve]}",
    "trainer: {callbacks+: {class_path: callbacks.loss_curve.LossCurve, init_args: {every_n_validations: 2}}}",
    "trainer: {callbacks: {LossCurve: {every_n_validations: 2}, TextSamples: null, Throughput: }}",
    "trainer: {callbacks: {callbacks.loss_curve.LossCurve: {every_n_validations: 2}, acme.Guard: {x: 1}}}",
    "trainer: {callbacks: [{class_path: acme.guards.Guard, init_args: {limit: [1, 2]}}]}",
    "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: x}}]}",
    "trainer: {logger: false}",
    "trainer: {logger: [MetricsCSV], plugins: AtomicCheckpoint, plugins+: [{class_path: acme.Plugin}]}",
    'trainer: {default_root_dir: "runs/${USER}", max_time: "00:01:00:00"}',
    "trainer: {logger: {class_path: TensorBoardLogger, init_args: {save_dir: x, flush_secs: 3}}}",  # by **kwargs
    "model: {network: GPT, objective: CausalLM, optimizer: AdamW, lr_scheduler: null}",
    "model: {network: {init_args: {n_layer: 2}}}",  # laid over a file that names the class
    "model: {optimizer: {class_path: torch.optim.Adam, init_args: {lr: 1.0e-3, betas: [0.9, 0.99]}}}",
    "model: {optimizer: {class_path: SGD, init_args: {lr: 1}}, lr_scheduler: {class_path: StepLR}}",
    "model: {network: acme.nets.Net}",
    "data: PretrainDataModule",
    "data: {class_path: tests.support.toy.ToyData, init_args: {rows: 3}}",
    "data: {class_path: PretrainDataModule, init_args: {reader: TextDocuments, cache_dir: null}}",
    "ckpt_path: last",
]
REFUSED = [
    "trainer: {callbacks: {LossCurv: null}}",
    "trainer: {callbacks: {LossCurve: {every_n: 2}}}",
    "trainer: {callbacks: {callbacks.loss_curve.LossCurve: {every_n: 2}}}",
    "trainer: {callbacks: {LossCurve: 3}}",
    "trainer: {callbacks+: [{class_path: callbacks.loss_curve.LossCurve, init_args: {every_n: 2}}]}",
    "trainer: {callbacks: [GPT]}",
    "trainer: {max_steps+: [3]}",
    "trainer: {plugins: LossCurve}",
    "model: {optimizer: {class_path: torch.optim.Adam, init_args: {lr: fast}}}",
    "model: {optimizer: {class_path: torch.optim.Adam, init_args: {betas: [0.9]}}}",
    "model: {optimizer: {class_path: AdamW, init_args: {params: []}}}",  # the run supplies them
    "data: {class_path: PretrainDataModule, init_args: {reader: {class_path: TextDocuments, init_args: {source: x}}}}",
    "data: {class_path: PretrainDataModule, init_args: {tokenizer: TextDocuments}}",
    "base: {defaults: 1}",
    "verbose: loud",
]


@pytest.mark.parametrize("text", PASSES)
def test_a_variant_passes(validator, text):
    assert problems(validator, yaml.safe_load(text)) == []


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_variant_is_refused(validator, text):
    assert not validator.is_valid(yaml.safe_load(text))


def test_the_tiny_run_passes(validator):
    assert problems(validator, TINY) == []


def test_arguments_carry_type_default_and_description(validator):
    found = validator.schema["definitions"]["plugins.networks.gpt.GPT-arguments"]
    assert found["title"] == "GPT"
    assert found["description"].startswith("A decoder-only transformer")
    assert found["additionalProperties"] is False
    assert found["properties"]["n_layer"] == {
        "description": "Number of blocks.",
        "default": 12,
        "anyOf": [{"type": "integer"}],
    }
    assert found["properties"]["position"]["anyOf"] == [{"enum": ["learned", "sinusoidal", "rotary"]}]
    assert found["properties"]["n_kv_head"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]


SAMPLES = [
    True,
    False,
    0,
    1,
    -3,
    2.5,
    "x",
    "",
    "auto",
    [],
    [1],
    [1.5, 2],
    ["a"],
    [1, 2, 3],
    {"a": 1},
    {"7": 1},
    {"a": "b"},
]
"""Not null and "3", which jsonargparse takes for every type, and for numbers."""


@pytest.mark.ci
def test_jsonargparse_takes_the_same_plain_values():
    targets, builder = sections(), Builder({})
    hints = {}
    for target in (
        targets["trainer"],
        targets["model"],
        *(e.load() for e in catalog.entries() if e.kind != "commands"),
    ):
        for name, argument in parameters(target)[0].items():
            if not class_types(argument.hint):
                hints[str(argument.hint)] = (name, argument.hint)
    assert len(hints) > 20
    for name, hint in hints.values():
        one = Draft7Validator({**builder.argument(hint), "definitions": builder.definitions})
        for value in SAMPLES:
            if isinstance(value, bool) and get_origin(hint) is Literal and value in get_args(hint):
                continue  # jsonargparse takes true for 1
            assert one.is_valid(value) == accepts(hint, value), (name, hint, value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, True),
        ((1, 2.5), True),
        ("x", True),
        (float("inf"), False),
        (float("nan"), False),
        ([object()], False),
    ],
)
def test_only_defaults_that_json_can_hold_are_told(value, expected):
    assert is_plain(value) == expected


ACME = '''
from lightning.pytorch import Callback
from core.technique import technique


@technique(paper="a blog post")
class AcmeGuard(Callback):
    """Guards the run.

    Args:
        limit: The highest loss.
    """

    def __init__(self, limit: float, modes: list[str] | None = None) -> None:
        pass
'''


@pytest.mark.ci
def test_a_third_party_technique_is_in_it_and_a_broken_one_is_left_out(packages, capsys):
    packages.add("acme", {"leyden.callbacks": {"AcmeGuard": "acme:AcmeGuard"}}, ACME)
    packages.add("broken", {"leyden.callbacks": {"Broken": "broken:Broken"}}, "import no_such_module")
    assert main(["schema"]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "Left out: Broken of broken 1.2 cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    ]
    validator = Draft7Validator(json.loads(output.out))

    def passes(text):
        return validator.is_valid(yaml.safe_load(f"trainer: {{callbacks+: [{text}]}}"))

    assert passes("{class_path: AcmeGuard, init_args: {limit: 2.5, modes+: [a]}}")
    assert not passes("{class_path: AcmeGuard, init_args: {limit: high}}")
    assert not passes("{class_path: acme.AcmeGuard, init_args: {limits: 3}}")
    assert not passes("Broken")
    assert passes("{class_path: broken.Broken, init_args: {x: 1}}")


def test_a_name_of_two_packages_needs_its_full_path(packages, capsys):
    for name in ("acme", "other"):
        packages.add(name, {"leyden.callbacks": {"AcmeGuard": f"{name}:AcmeGuard"}}, ACME)
    assert main(["schema"]) == 0
    validator = Draft7Validator(json.loads(capsys.readouterr().out))
    assert not validator.is_valid({"trainer": {"callbacks": ["AcmeGuard"]}})
    assert validator.is_valid({"trainer": {"callbacks": ["acme.AcmeGuard"]}})
