"""A process that has loaded the program and forks itself for each command that it is sent.

Each command has a process of its own, as from a shell, without the seconds that loading takes.
"""

import json
import os
import signal
import sys
import traceback


def serve():
    """Reads commands, one JSON list in a line, and answers with how each ended."""
    import torch

    import irpe.adapters.hosts.timm
    import irpe.cli.commands.train
    import irpe.cli.main
    import irpe.train.engine
    import irpe.viz.canvas

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(irpe.cli.main.main, **request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(main, arguments, cwd, seconds):
    """Runs the program in this process, which ends with it.

    Args:
        main: The program.
        arguments: Its arguments.
        cwd: Where it runs; what it writes goes to `stdout` and `stderr` beside that folder.
        seconds: How long it may run; 0 is for ever.
    """
    code = 99
    try:
        os.chdir(cwd)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"../{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["irpe", *arguments]
        signal.alarm(seconds)
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = 1 if isinstance(end.code, str) else end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
