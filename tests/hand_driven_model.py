"""The smallest model that can be watched; tests fire its hooks by hand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Hooks:
    """A list of hooks whose entries can be removed."""

    hooks: list[Callable[..., None]] = field(default_factory=list)

    def register(self, hook: Callable[..., None]) -> "HookHandle":
        self.hooks.append(hook)
        return HookHandle(self, hook)

    def fire(self, *arguments: Any) -> None:
        for hook in list(self.hooks):
            hook(*arguments)


@dataclass
class HookHandle:
    """Takes one hook out."""

    owner: Hooks
    hook: Callable[..., None]

    def remove(self) -> None:
        if self.hook in self.owner.hooks:
            self.owner.hooks.remove(self.hook)


class HandDrivenTensor:
    """An array with a gradient hook; the smallest thing that satisfies the protocol."""

    trainable = True
    weight_decay = False

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.gradient_hooks = Hooks()

    def register_gradient_hook(self, hook: Callable[..., None]) -> HookHandle:
        return self.gradient_hooks.register(hook)


class HandDrivenModule:
    """A module with the hooks of its role."""

    def __init__(self, role: str, layer: int | None) -> None:
        self.role, self.layer = role, layer
        self.forward_hooks, self.attention_hooks = Hooks(), Hooks()

    def register_forward_hook(self, hook: Callable[..., None]) -> HookHandle:
        return self.forward_hooks.register(hook)

    def register_attention_hook(self, hook: Callable[..., None]) -> HookHandle:
        return self.attention_hooks.register(hook)


class HandDrivenModel:
    """One weight, one relu and one attention, driven by hand."""

    def __init__(self) -> None:
        self.weight = HandDrivenTensor(np.ones((2, 2), np.float32))
        self.modules = {"mlp": HandDrivenModule("linear", 0), "mlp.relu": HandDrivenModule("relu", 0)}
        self.modules["attention"] = HandDrivenModule("attention", 1)

    def named_parameters(self) -> Iterator[tuple[str, HandDrivenTensor]]:
        yield "mlp.weight", self.weight

    def tied_names(self) -> list[tuple[str, str]]:
        return [("head.weight", "mlp.weight")]

    def named_modules(self) -> Iterator[tuple[str, HandDrivenModule]]:
        yield from self.modules.items()

    def all_hooks(self) -> list[Callable[..., None]]:
        registries = [self.weight.gradient_hooks]
        for module in self.modules.values():
            registries += [module.forward_hooks, module.attention_hooks]
        return [hook for registry in registries for hook in registry.hooks]

    def relu(self, rows: list[list[float]], token_mask: list[bool] | None = None) -> HandDrivenTensor:
        output = HandDrivenTensor(np.array(rows, np.float32))
        mask = None if token_mask is None else np.array(token_mask)
        self.modules["mlp.relu"].forward_hooks.fire(output, mask)
        return output
