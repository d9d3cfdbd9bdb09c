"""The ground on which every command runs: arguments, files, signals, processes, devices. It knows neither
models nor rows.
"""
