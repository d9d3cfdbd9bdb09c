#!/usr/bin/env python3
"""Train a model on files of training data, and validate it on files of its own.

    python train_mixer.py --train-data a.csv b.csv --val-data v.csv --save-dir ./output --formatter hisco
    torchrun --nproc_per_node=4 train_mixer.py --distributed --train-data a.csv --val-data v.csv \\
        --save-dir ./output

The same command again goes on where the run in the save folder stopped.
"""

from histocc import stopping

if __name__ == "__main__":
    stopping.start_listening()  # from here on a signal is heard, though importing torch takes seconds

from histocc import cli, dry_run, job_data


def get_args_parser() -> cli.Parser:
    parser = cli.make_parser("train_mixer.py", __doc__.split("\n", 1)[0])
    parser.add_argument(
        "--train-data",
        "--data-dir",
        "--data-root",
        dest="train_data",
        nargs="+",
        required=True,
        metavar="FILE.csv",
        help="descriptions and codes to train on",
    )
    parser.add_argument(
        "--val-data",
        nargs="+",
        required=True,
        metavar="FILE.csv",
        help="descriptions and codes to validate on",
    )
    parser.add_argument(
        "--target-col-naming",
        default="hisco",
        metavar="NAME",
        help="without --target-cols: take NAME_1 … NAME_5 where the file has them",
    )
    cli.add_run_arguments(parser, "--save-dir", None, save_interval=5000)
    cli.add_data_arguments(parser, formatter="hisco", use_val_share=False)
    cli.add_model_arguments(parser)
    cli.add_training_arguments(parser, num_epochs=50, default_batch=512, seq2seq_weight=0.5)
    return parser


def run(args, world):
    """All ranks."""
    data, formatter = job_data.prepared(
        args, world, args.train_data, args.val_data, naming=args.target_col_naming
    )
    dry_run.run_as_asked(args, world, data, formatter, files=args.train_data)


def main(argv=None):
    cli.start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
