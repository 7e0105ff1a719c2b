"""A registry of callbacks that costs one truth test while it is empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Hook = Callable[..., None]


class HookRegistry:
    """Hooks in the order of their registration."""

    __slots__ = ("_hooks", "_next_key")

    def __init__(self) -> None:
        self._hooks: dict[int, Hook] = {}
        self._next_key = 0

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def register(self, hook: Hook) -> HookHandle:
        """The handle that takes ``hook`` out again."""
        key = self._next_key
        self._next_key += 1
        self._hooks[key] = hook
        return HookHandle(self._hooks, key)

    def fire(self, *arguments: Any) -> None:
        """Call every hook; one that removes itself while it runs is allowed."""
        for hook in tuple(self._hooks.values()):
            hook(*arguments)


@dataclass(frozen=True)
class HookHandle:
    """What registering returns."""

    hooks: dict[int, Hook]
    key: int

    def remove(self) -> None:
        """Take the hook out; a second call does nothing."""
        self.hooks.pop(self.key, None)
