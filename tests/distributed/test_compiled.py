"""Compiled blocks under each kind of strategy: the run of one process that compiles nothing."""

import json
from copy import deepcopy

import pytest

from plugins.cli.configuration.config_files import merge
from tests.support.combinations import COMBINATIONS
from tests.support.same_run import TOLERANCE, differences, fit, one_process

SHARDED = "FSDP, stage 3, 2 ranks"
STEPPED = {"class_path": "AdEMAMix", "init_args": {"lr": 3e-3, "eps": 1e-3}}
"""Its update is compiled where weights are sharded; with this epsilon a gradient that is zero in theory moves nothing."""

GRAPHS = {  # of blocks and of the loss where logits are whole, with ring attention of what is between its messages
    SHARDED: 3,  # and of the optimizer's update
    "HybridParallel, tensor 2, sequence 2, 2 ranks": 1,
    "DDP, static_graph, bucket_mb 0.001, 2 ranks": 2,
    "DeepSpeedZero, stage 2, optimizer on the CPU, 2 ranks": 2,
    "HybridParallel, data_shard 2, tensor 2, sequence 2, 4 ranks": 1,
    "HybridParallel, pipeline 2, 1F1B, 2 ranks": 1,
    "HybridParallel, context 2, ulysses, documents, 2 ranks": 2,
    "HybridParallel, context 2, ring, documents, 2 ranks": None,
}
BY_NAME = {str(item): item for item in COMBINATIONS}
MARKS = [pytest.mark.ci] + [pytest.mark.slow] * 7


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=mark) for name, mark in zip(GRAPHS, MARKS, strict=True)]
)
def test_compiled_ranks_are_the_run_of_one_process(name):
    item, stepped = BY_NAME[name], name == SHARDED
    more = {"model": {"optimizer": STEPPED}} if stepped else {}
    compiled = {"class_path": "Compile", "init_args": {"backend": "aot_eager", "optimizer": stepped}}
    overlay = merge(deepcopy(dict(item.overlay)), more)
    found = fit(merge(overlay, {"trainer": {"callbacks": [compiled]}}), item.ranks)
    apart = differences(found, one_process(merge(deepcopy(dict(item.config)), more)))
    assert max(apart.values()) <= TOLERANCE, apart
    assert "Compile: 0 graphs" not in found.error_text  # pipelines compute nothing before a step's last batch
    said = json.loads((found.folder / "compile.json").read_text())
    assert len(said["graphs"]) == GRAPHS[name] or GRAPHS[name] is None
    assert bool(said["breaks"]) == (GRAPHS[name] is None)
