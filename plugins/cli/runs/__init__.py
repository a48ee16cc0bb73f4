"""One run: its parser and trainer, its folder, who launched it, how it is stopped and started again."""
