-- What was learned of run times; no rebuild changes it. Without an argument it is returned; with one, ARGV[5] replaces it.
if ARGS[1] then call('SET', BESIDE .. '-run-times', ARGV[5]) end
return {call('GET', BESIDE .. '-run-times') or ''}
