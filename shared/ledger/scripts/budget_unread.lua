-- Read the journal of tenures from where it was taken in last. Arguments: prefix of the budgets, the
-- most entries. Answers {epoch, now in ms, epoch and cursor as stored, whether the entry at the cursor is
-- gone, whether all was read, rows of {entry, kind, number of leases}}, and the leases.
local B, most = A[1], A[2]
local stored = call('HMGET', B .. 'meta', 'epoch', 'cursor')
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local cursor = stored[1] == epoch and stored[2] or '0-0'
local lost = cursor ~= '0-0' and #call('XRANGE', P .. 'tenures', cursor, cursor) == 0
local found = call('XRANGE', P .. 'tenures', lost and '-' or '(' .. cursor, '+', 'COUNT', most)
local rows, followed = {}, {''}
for i, entry in ipairs(found) do
  local fields, kind = entry[2], entry[2][2]
  for f = 4, #fields, 2 do followed[#followed + 1] = fields[f] end
  rows[i] = {entry[1], kind, #fields / 2 - 1}
end
followed[1] = pack({epoch, string.format('%.0f', now), stored[1] or '', cursor, lost,
  #found < most, rows})
return followed
