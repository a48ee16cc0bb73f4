"""Shapes of what ranks hold."""


def shapes(value):
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shapes(item) for item in value]
    return (value.shape, value.dtype, value.device) if hasattr(value, "shape") else value
