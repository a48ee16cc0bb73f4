"""The telling line of jsonargparse's messages on unions."""

from plugins.cli.configuration.mistakes import main_reason


def test_the_telling_one_of_a_unions_errors():
    head = "Does not validate against any of the Union subtypes\nSubtypes: [a, b]\nErrors:\n"
    assert (
        main_reason(head + "  - Expected a <class 'str'>\n  - no monitor\n    - a path\n  - Expected a <x>")
        == "no monitor"
    )
    assert (
        main_reason(head + "  - Expected a <class 'str'>\n  - Expected a <class 'int'>")
        == "Expected a <class 'int'>"
    )
    assert main_reason("plain") == "plain"
