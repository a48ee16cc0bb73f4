"""Imported first by the fork server: like a command, it does without torch's compiler and plots until a run needs them."""

from plugins.cli.lean_imports import defer_compiler_and_plots, defer_torchmetrics

defer_torchmetrics()
defer_compiler_and_plots()
