#!/usr/bin/env python3
"""Fine-tune a model on tables of descriptions and codes, split by text into training and validation.

From scratch, on a laptop, with columns whose names say what they are (occ1, lang, hisco_1, hisco_2 …):

    python finetune.py data.csv --save-path ./mine

From a published model or an earlier run, on one GPU:

    python finetune.py data.csv --target-cols hisco_1 hisco_2 --language en \\
        --initial-checkpoint ./published --save-path ./mine --batch-size 128 --bf16

On four GPUs or four CPU processes, then with the older launcher, and last an estimate of the cost:

    torchrun --nproc_per_node=4 finetune.py data.csv --distributed --save-path ./mine
    python -m torch.distributed.launch --nproc_per_node=4 finetune.py data.csv --distributed …
    python finetune.py data.csv --save-path ./mine --dry-run

The same command, given again, continues where the run in the save folder stopped. Where to look in histocc/:

    the flags                     config.py in job/, data/, trainer/ and runtime/
    the run, from top to bottom   job/train.py
    the losses of a batch         seq2seq_mixer_engine.py, `MixerTask.losses`
    the learning rate of a step   trainer/schedule.py, `linear_factor`
    the loop                      trainer/loop.py, `train`
    SIGTERM                       caught in runtime/signals.py. trainer/loop.py saves last.bin before the next
                                  step. `start` in runtime/frame.py exits with 0, or 130 after Ctrl-C.
"""

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # before torch is imported, which takes seconds

from histocc.job import config, inputs, train
from histocc.runtime.frame import start


def get_args_parser():
    return config.finetune_parser()


def run(args, world):
    """Prepare the data, then do the run. All ranks."""
    train_files, val_files = inputs.dataset_files(args.dataset)
    args, read = inputs.prepare_data(args, world, train_files, val_files)
    train.run_training(args, read, world)


def main(argv=None):
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
