"""What a function returned on each of several connected processes."""

import json

from conformance.runs import on_ranks


def found_on_ranks(function, ranks, folder, *arguments):
    """Returns `function(rank, *arguments)` of each rank, as JSON keeps it; `folder` exists and is empty."""
    on_ranks(_keep, ranks, function, folder, arguments)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _keep(rank, function, folder, arguments):
    (folder / f"{rank}.json").write_text(json.dumps(function(rank, *arguments)))
