"""The loaders of training frameworks, built by their own code, each in a process that is killed and starts again.

torchtitan, TransferQueue and verl are those that are installed. The arguments of the examples are compared with the
code of a checkout that a variable names; where none does, these tests skip: ASYNCDATA_AXOLOTL,
ASYNCDATA_MEGATRON_BRIDGE, ASYNCDATA_NEMO_RL and ASYNCDATA_OPENRLHF.
"""
