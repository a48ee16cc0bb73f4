"""Pictures are the same bytes each time, and one that cannot be written costs a warning."""

import struct

import pytest

from toolkit import pictures


def drawn():
    figure = pictures.new_figure(4, 2)
    axes = figure.add_subplot()
    axes.plot([1, 3, 2])
    pictures.tidy(axes)
    return figure


def test_the_same_figure_is_the_same_file(tmp_path):
    pictures.save(drawn(), tmp_path / "one.png")
    found = (tmp_path / "one.png").read_bytes()
    assert found == pictures.as_png(drawn())
    assert struct.unpack(">II", found[16:24]) == (600, 300)  # 150 dots an inch
    assert b"Software" not in found


def test_the_upper_and_the_right_edge_are_gone():
    [axes] = drawn().axes
    assert {name for name, spine in axes.spines.items() if spine.get_visible()} == {"left", "bottom"}


def test_a_picture_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.warns(UserWarning, match=r"one\.png could not be written"):
        pictures.save(drawn(), tmp_path / "folder" / "one.png")
