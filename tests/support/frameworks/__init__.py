"""The loaders of training frameworks, built by their own code, each in a process that is killed and starts again.

torchtitan, TransferQueue and verl are those that are installed. The code of others is in a checkout that a variable
names; where none does, its tests skip: ASYNCDATA_MILES, ASYNCDATA_XTUNER, and for the arguments of the examples
ASYNCDATA_AXOLOTL, ASYNCDATA_MEGATRON_BRIDGE, ASYNCDATA_NEMO_RL and ASYNCDATA_OPENRLHF.
"""
