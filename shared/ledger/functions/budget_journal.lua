-- Read the journal of tenures from a reader's cursor. Arguments: maximum number of entries; the reader, `journal` or
-- `cost`. Returns {generation, now in ms, generation and cursor as stored, whether the entry at the cursor is missing,
-- whether all was read, rows of {entry, kind, number of leases}}, and the leases.
local ledger = require('ledger')
local server = require('server')
local call, encode = redis.call, cmsgpack.pack

return function(most, reader)
  local stored = call('HMGET', server.beside .. '-budget:' .. reader, 'generation', 'cursor')
  local cursor = stored[1] == ledger.generation and stored[2] or '0-0'
  local is_lost = cursor ~= '0-0' and #call('XRANGE', server.prefix .. 'tenures', cursor, cursor) == 0
  local found = call('XRANGE', server.prefix .. 'tenures', is_lost and '-' or '(' .. cursor, '+', 'COUNT', most)
  local rows, answer = {}, {''}
  for i, entry in ipairs(found) do
    local fields, kind = entry[2], entry[2][2]
    for f = 4, #fields, 2 do answer[#answer + 1] = fields[f] end
    rows[i] = {entry[1], kind, #fields / 2 - 1}
  end
  answer[1] = encode({ledger.generation, string.format('%.0f', server.now_in_ms()), stored[1] or '', cursor, is_lost,
    #found < most, rows})
  return answer
end
