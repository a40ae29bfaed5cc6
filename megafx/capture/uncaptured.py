"""The smallest submodule whose call holds a line that cannot be traced: what is left eager where `Config(uncaptured="eager")`.

The model's own code runs while it is traced, so the stack of the error shows which calls of submodules the line is in.
"""

from __future__ import annotations

import traceback

from torch import nn
from torch.nn.modules import module as torch_module

_CALL = nn.Module._call_impl.__code__.co_name


def called_part(error: BaseException, model: nn.Module) -> str:
    """FQN of the deepest submodule of the model whose call is on the error's stack; '' where it is the model itself.

    A method of a submodule that the code calls by name is part of the module whose forward calls it.
    """
    paths = {id(m): path for path, m in model.named_modules()}
    found, seen = "", error
    while True:
        frames = [frame for frame, _ in traceback.walk_tb(seen.__traceback__)]
        for frame in frames:
            if frame.f_code.co_filename == torch_module.__file__ and frame.f_code.co_name == _CALL:
                found = paths.get(id(frame.f_locals.get("self")), found)
        following = seen.__cause__ or seen.__context__
        if frames or following is None:
            return found
        seen = following
