"""Routes of mixtures of experts in an engine's answer: decode and check which experts each token used."""

from __future__ import annotations

import numpy as np

from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.data.trajectory import Routes, route_dtype


def unpack_routes(values: bytes, shape: tuple[int, int, int]) -> Routes:
    """Decode routes from the plug-in's binary answer. Raises ValueError."""
    count = shape[0] * shape[1] * shape[2]
    routes: Routes = np.frombuffer(values, np.uint8 if len(values) == count else np.uint16)
    return routes.reshape(shape)


def check_routes(routes: Routes, tokens: int, experts: ExpertShape) -> Routes:
    """The routes of the layers with experts: uint8 or int16 [tokens, layers, experts per token].

    routes: of all layers of the model, as vLLM returns them. tokens: expected number of tokens. Raises
    ValueError if shape or values are invalid: kernels that choose experts themselves leave zeros.
    """
    if routes.ndim != 3 or len(routes) != tokens or routes.shape[1] <= experts.layers[-1]:
        raise ValueError(f"routes of shape {routes.shape} for {tokens} tokens")
    rows = routes[:, experts.layers].astype(route_dtype(experts.count))
    if rows.shape[2] != experts.per_token:
        raise ValueError(f"{rows.shape[2]} experts for each token instead of {experts.per_token}")
    if rows.size and (rows.max() >= experts.count or rows.min() < 0):
        raise ValueError(f"an expert beyond the {experts.count} of the model")
    if rows.size and not rows.any() and experts.count > 1:
        raise ValueError("routes that are all zero: its kernels for experts report none")
    columns = np.ascontiguousarray(rows.reshape(-1, experts.per_token).T)
    for k in range(
        1, experts.per_token
    ):  # compares each pair of columns: much faster than sorting short rows
        if (columns[k:] == columns[:-k]).any():
            raise ValueError("routes with an expert twice for a token: its kernels for experts report none")
    return rows
