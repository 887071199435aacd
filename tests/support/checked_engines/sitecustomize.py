"""Has the engines of a server check their own data: Python runs this at its start where this folder is in PYTHONPATH.

Whenever an engine has nothing to do, its scheduler and cache are checked, and it writes its process id to the file
CHECKED_ENGINES. One that finds a mistake ends, and says so.
"""

import os
import sys

if "kvern.serving.process" in sys.orig_argv:
    from kvern.engine.core import EngineCore
    from kvern.request.events import EngineStatistics

    report = EngineCore.statistics

    def checked(core: EngineCore) -> EngineStatistics:
        if not core.has_work:
            core.scheduler.check_integrity()
            with open(os.environ["CHECKED_ENGINES"], "a") as file:
                file.write(f"{os.getpid()}\n")
        return report(core)

    EngineCore.statistics = checked  # type: ignore[method-assign]
