"""The flags by which the processes of one command find each other."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from jaxspec.cli.interrupts import INTERRUPTS
from jaxspec.cli.status import status_of
from jaxspec.errors import ConfigError, JaxspecError


@dataclass(frozen=True)
class HostFlags:
    """Several processes that run the same command, each with its own devices; process 0 writes.

    Attributes:
      distributed: Meet the other processes of this job; Slurm, Open MPI and Kubernetes say where they are.
      coordinator_address: HOST:PORT of process 0 where nothing else says it; implies --distributed.
      num_processes: How many processes there are.
      process_id: Number of this one, from 0.
      meeting_timeout: Seconds to wait for the others.
      lost_timeout: Seconds that another process may be silent until this one ends, too.
    """

    GROUP: ClassVar = "multi-host"

    distributed: bool = False
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    meeting_timeout: int = 120
    lost_timeout: int = 30

    @property
    def wanted(self) -> bool:
        """Whether there are other processes to meet.

        Raises:
          ConfigError: there are, but nothing says where.
        """
        several = self.distributed or self.coordinator_address is not None
        if not several and (self.num_processes is not None or self.process_id is not None):
            raise ConfigError(
                "hosts: --num-processes and --process-id say nothing alone; give --coordinator-address HOST:PORT, or "
                "--distributed where a cluster says it"
            )
        return several

    @contextmanager
    def together(self) -> Iterator[bool]:
        """Joins the other processes if asked to, and yields whether this one writes and talks.

        Raises:
          ConfigError: the others are not there, or nothing says where they are.
        """
        if not self.wanted:
            yield True
            return
        from jaxspec.sharding import hosts

        where = self.coordinator_address or "the address that the cluster gives"
        sys.stderr.write(f"jaxspec: waiting up to {self.meeting_timeout} s for all processes at {where}\n")
        hosts.initialize(
            self.coordinator_address, self.num_processes, self.process_id,
            initialization_timeout_s=self.meeting_timeout, heartbeat_timeout_s=self.lost_timeout,
        )  # fmt: skip
        INTERRUPTS.arm()  # JAX takes SIGTERM for itself
        try:
            yield hosts.is_leader()
        except JaxspecError as error:
            sys.stderr.write(f"jaxspec: {error}\n")
            sys.stderr.flush()
            os._exit(status_of(error))  # to leave in good order would be to wait for processes that may be gone
