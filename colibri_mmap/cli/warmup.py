"""`warmup`: compile the kernels ahead of the first run."""

from __future__ import annotations

from colibri_mmap.cli import options


def warmup(
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    mode: options.ArithmeticMode = "int8",
    kv_type: options.KVElementType = None,
    verbose: options.Verbose = False,
) -> None:
    """Compile the kernels for this CPU, so that no first run has to.

    With a model only those that it needs, else all of them.
    """
    given = options.given_model(model, model_option)

    from colibri_mmap.cli.console import ProgressBar, results
    from colibri_mmap.format.gguf import open_gguf
    from colibri_mmap.runtime.warmup import all_tasks, compile_tasks, model_tasks

    if given is None:
        tasks = all_tasks()
    else:
        elements = kv_type or ("f32" if mode == "exact" else "f16")
        tasks = model_tasks(open_gguf(given.path), mode, elements)
    with ProgressBar() as bar:
        compiled = compile_tasks(tasks, bar)
    results().print(f"{len(tasks)} kernels are ready, {compiled} of them new")
