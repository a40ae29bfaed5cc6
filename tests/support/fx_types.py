"""A plugin of mypy (pyproject.toml names it): what a node's target and arguments are depends on its op, so they are Any.

torch.fx declares them as unions of all that any node may have: no use of an argument passes without a cast.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import AttributeContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny

ANY = AnyType(TypeOfAny.explicit)
TYPES: dict[str, Callable[[AttributeContext], Type]] = {
    "torch.fx.node.Node.args": lambda c: c.api.named_generic_type("builtins.tuple", [ANY]),
    "torch.fx.node.Node.kwargs": lambda c: c.api.named_generic_type(
        "builtins.dict", [c.api.named_generic_type("builtins.str", []), ANY]
    ),
    "torch.fx.node.Node.target": lambda c: ANY,
}


class FxTypes(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        return TYPES.get(fullname)


def plugin(version: str) -> type[Plugin]:
    return FxTypes
