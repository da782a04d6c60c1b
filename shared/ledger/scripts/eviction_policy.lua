-- Serve nothing while the server may evict keys. Returns true, or an error that names its policy.
local has_info, info = pcall(call, 'INFO', 'memory')
local policy = has_info and string.match(info, 'maxmemory_policy:(%S+)') or KEEPS_KEYS
if policy ~= KEEPS_KEYS then
  if state[11] ~= policy then call('HSET', PREFIX .. 'ledger', 'evicts', policy) end
  return redis.error_reply('EVICTS ' .. policy)
end
if state[11] then call('HDEL', PREFIX .. 'ledger', 'evicts') end
return encode(true)
