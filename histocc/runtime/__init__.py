"""The base of every command: arguments, files, signals, processes, devices. It knows nothing of models or
rows.
"""
