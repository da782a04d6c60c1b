-- Answers what decides whose turn it is (fair.lua): {cores, MiB} of all healthy devices, namespaces each
-- before what it takes of cores, and of memory, and rows of {namespace, whether it has no budget left,
-- share, whether its new pods wait}.
local rights = {}
local found = call('HGETALL', P .. 'rights')
for i = 1, #found, 2 do
  local right = decode(found[i + 1])
  rights[#rights + 1] = {found[i], right[1] == 1, right[2], right[3] == 1}
end
return pack({fair.total_of(), call('HGETALL', P .. 'taken-cores'), call('HGETALL', P .. 'taken-mib'),
  rights})
