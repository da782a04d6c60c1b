-- Serve nothing while the server may evict keys. Returns true, or an error that names its policy.
local constants = require('constants')
local ledger = require('ledger')
local server = require('server')
local call, encode = redis.call, cmsgpack.pack

return function()
  local has_info, info = pcall(call, 'INFO', 'memory')
  local policy = has_info and string.match(info, 'maxmemory_policy:(%S+)') or constants.KEEPS_KEYS
  if policy ~= constants.KEEPS_KEYS then
    if ledger.evicts ~= policy then call('HSET', server.prefix .. 'ledger', 'evicts', policy) end
    return redis.error_reply('EVICTS ' .. policy)
  end
  if ledger.evicts then call('HDEL', server.prefix .. 'ledger', 'evicts') end
  return encode(true)
end
