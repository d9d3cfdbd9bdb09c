#!/usr/bin/env python3
"""Fine-tune a model on tables of descriptions and codes, split into training and validation by the texts.

From scratch, on a laptop, with columns whose names say what they are (occ1, lang, hisco_1, hisco_2 …):

    python finetune.py --dataset data.csv --save-path ./mine

From a published model or an earlier run, on one GPU:

    python finetune.py --dataset data.csv --target-cols hisco_1 hisco_2 --language en \\
        --initial-checkpoint ./published --save-path ./mine --batch-size 128 --bf16

On four GPUs, or four CPU processes; with the older launcher; and what it would cost:

    torchrun --nproc_per_node=4 finetune.py --distributed --dataset data.csv --save-path ./mine
    python -m torch.distributed.launch --nproc_per_node=4 finetune.py --distributed --dataset data.csv …
    python finetune.py --dataset data.csv --save-path ./mine --dry-run

The same command, given again, continues where the run in the save folder stopped. What is where, in histocc/:

    the flags                     job/config.py, trainer/config.py
    the run, from top to bottom   job/train.py
    the losses of a batch         seq2seq_mixer_engine.py, `MixerTask.losses`
    the learning rate of a step   trainer/schedule.py, `linear_factor`
    the loop                      trainer/loop.py, `train`
    SIGTERM                       heard in runtime/signals.py; trainer/loop.py saves last.bin before the next
                                  step; exit code 0 (130 after Ctrl-C), by `start` in runtime/frame.py
"""

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # from here on a signal is heard, though importing torch takes seconds

from histocc.job import config, inputs, train
from histocc.runtime.frame import start


def get_args_parser():
    return config.finetune_parser((__doc__ or "").split("\n", 1)[0])


def run(args, world):
    """Prepare the data, then do the run. All ranks."""
    train_files, val_files = inputs.dataset_files(args.dataset)
    args, read = inputs.prepare_data(args, world, train_files, val_files)
    train.train(args, read, world)


def main(argv=None):
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
