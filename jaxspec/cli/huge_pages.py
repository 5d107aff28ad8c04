"""Huge pages for what an update of training takes of memory and gives back, gigabytes each time."""

import os
import sys
from pathlib import Path

TUNABLES, HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
RESTARTED = "JAXSPEC_RESTARTED"  # glibc takes its variable away from programs with privileges
MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages() -> None:
    """Starts this process anew if it then gets huge pages: glibc reads whether to ask for them only at the start.

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
