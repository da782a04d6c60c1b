-- List waiting pods. Arguments: {'pods', pods}, {'scan', cursor, count} or {'uids'}. Returns uids;
-- otherwise the next cursor ('0': complete) and the waiting pods.
local server = require('server')
local waiting = require('waiting')
local call, encode = redis.call, cmsgpack.pack

return function(what, second, count)
  if what == 'uids' then return encode(call('HKEYS', server.prefix .. 'waiting')) end

  local cursor, stored = '0', {}
  if what == 'scan' then
    local found = call('HSCAN', server.prefix .. 'waiting', second, 'COUNT', count)
    cursor = found[1]
    for i = 2, #found[2], 2 do stored[#stored + 1] = found[2][i] end
  else
    stored = server.call_all('HMGET', 'waiting', second)
  end
  local rows = {}
  for _, value in ipairs(stored) do rows[#rows + 1] = waiting.waiting_of(value) end
  return encode({cursor, rows})
end
