"""Covers distributed/failures.py: a run that has a mesh waits for gloo's threads at its end, once."""

import atexit
import subprocess
import sys
import time
from unittest import mock

from megafx.distributed.failures import SECONDS, wait_at_exit

MESHES = """
import time, atexit
from unittest import mock
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import megafx
from torch import nn
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
with mock.patch.object(atexit, "register") as asked:
    for _ in range(2):
        megafx.parallelize(nn.Linear(2, 2))
waits = [call for call in asked.call_args_list if call.args[0] is time.sleep]
print(len(waits))
"""


def test_it_is_asked_for_once() -> None:
    wait_at_exit.cache_clear()
    with mock.patch.object(atexit, "register") as register:
        wait_at_exit()
        wait_at_exit()
    register.assert_called_once_with(time.sleep, SECONDS)


def test_parallelize_asks_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", MESHES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
