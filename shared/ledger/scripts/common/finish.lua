-- After every script: how many records there are now.
local records_now = count_records()
if records_now ~= records and call('EXISTS', PREFIX .. 'ledger') == 1 then
  call('HSET', PREFIX .. 'ledger', 'records', records_now)
end
return reply
