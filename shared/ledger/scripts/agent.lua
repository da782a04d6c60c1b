-- Was it an agent of ours that told last of a node's devices? Argument: name.
return pack(call('HGET', P .. 'facts:' .. A[1], 'agent') == '1')
