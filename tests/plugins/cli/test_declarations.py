"""A declaration that is not of the form of `@technique` is refused before a run, with the class."""

import pytest

from core.errors import ConfigError
from core.technique import Package, technique
from plugins.cli import selection


class Declared:
    """Is declared by each test."""


BAD = {
    "needs='deepspeed'": ({"needs": "deepspeed"}, "needs is 'deepspeed', not a list: write needs=[...]."),
    "needs=['deepspeed']": ({"needs": ["deepspeed"]}, "write needs=[Package('deepspeed')]."),
    "needs=[Package]": ({"needs": [Package]}, "which is no need"),
    "needs=1": ({"needs": 1}, "needs is 1, not a list"),
    "requirement": ({"needs": [Package("not a req!!")]}, "no requirement as pip takes it"),
    "before='X'": ({"before": "X"}, "before is 'X', not a list"),
    "after=[1]": ({"after": [1]}, "1 is none"),
    "owns": ({"owns": ["learning_rates"]}, "owns has 'learning_rates'. Did you mean learning_rate?"),
    "owns 'lr'": ({"owns": ["lr"]}, "It takes batch_size, gradient_accumulation, "),
    "offers": ({"offers": "exact_resume"}, "offers is 'exact_resume', not a list"),
    "conflicts=[]": ({"conflicts": ["A"]}, "not a mapping of names to reasons"),
    "conflicts={A: None}": ({"conflicts": {"A": None}}, "not a mapping of names to reasons"),
    "api": ({"api": 1}, "not a range of versions"),
    "maturity": ({"maturity": "beta"}, "not one of stable, experimental"),
    "paper": ({"paper": None}, "paper is None, not a text"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_declaration_is_refused_with_the_class(case):
    arguments, message = BAD[case]
    technique(**{"paper": "a test", **arguments})(Declared)
    with pytest.raises(ConfigError) as error:
        selection.describe("trainer.callbacks.0", Declared, f"{__name__}.Declared")
    assert str(error.value).startswith(f"@technique(...) of {__name__}.Declared: ")
    assert message in str(error.value)
