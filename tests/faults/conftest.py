"""One tiny model pair a session; one running stack a module."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from stack import Stack, running_stack, stack_config

from paceline.testing.tiny_models import tiny_pair

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a tiny target and a draft that often agrees with it."""
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(pair: tuple[Path, Path]) -> AsyncIterator[Stack]:
    """The whole system on the tiny pair."""
    async with running_stack(stack_config(*pair)) as running:
        yield running
