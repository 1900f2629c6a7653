"""Plain torch views of pieces, for every way that cuts and copies itself."""

from __future__ import annotations

import torch

from weightsync.service.bench.layout import Box
from weightsync.service.bench.members import Member


def cut(tensor: torch.Tensor, box: Box, piece: Box) -> torch.Tensor:
    """The view of `piece` in a tensor that holds `box`."""
    rows = tensor[piece.row - box.row : piece.row - box.row + piece.rows]
    if tensor.dim() == 1:
        return rows
    return rows[:, piece.column - box.column : piece.column - box.column + piece.columns]


def take(worker: Member, rank: int, name: str, shard: torch.Tensor) -> None:
    """Copy what a worker wants out of a rank's whole shard of a tensor."""
    held, wanted = worker.layout.held(rank)[name], worker.boxes[name]
    piece = held.meet(wanted)
    if piece is not None:
        cut(worker.tensors[name], wanted, piece).copy_(cut(shard, held, piece))
