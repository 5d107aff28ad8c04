"""Huge pages for the memory that each update of training takes from the kernel and gives back."""

import os
import sys
from pathlib import Path

TUNABLES, HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
RESTARTED = "JAXSPEC_RESTARTED"  # glibc takes its variable away from programs with privileges
MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages() -> None:
    """Restarts this process with huge pages, which glibc asks for only if told so when a process starts.

    Does nothing where the variable says something of them already, and where the kernel gives them to all or to none.
    """
    given = os.environ.get(TUNABLES, "")
    if HUGE in given or RESTARTED in os.environ or not sys.executable:
        return
    if not MODES.is_file() or "[madvise]" not in MODES.read_text():
        return
    os.environ[RESTARTED] = "1"
    os.environ[TUNABLES] = ":".join([given, f"{HUGE}=1"] if given else [f"{HUGE}=1"])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
