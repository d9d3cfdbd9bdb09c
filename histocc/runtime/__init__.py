"""What every command runs in: arguments, files, signals, processes, devices. It knows no model and no
rows.
"""
