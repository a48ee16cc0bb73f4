"""What a checkpoint is: one file or a folder of parts; which is the newest whole one."""
