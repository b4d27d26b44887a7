# Ask for the machines; once they are ACTIVE, go on
gcloud compute tpus queued-resources create base-1b-12345678 --zone=us-east5-b --project=my-project --quiet --accelerator-type=v6e-256 --runtime-version=v2-alpha-tpuv6e --node-count=2 --node-prefix=base-1b-12345678 --spot --valid-until-duration=6h --network=net --subnetwork=sub --service-account=me@my-project.iam.gserviceaccount.com --labels=longhaul=base-1b-12345678,team=a --tags=train
# Are they?
gcloud compute tpus queued-resources describe base-1b-12345678 --zone=us-east5-b --project=my-project --quiet --format=json
# Make room for the files
gcloud compute tpus queued-resources ssh base-1b-12345678 --zone=us-east5-b --project=my-project --quiet --node=all --worker=all --ssh-flag=-oServerAliveInterval=15 --ssh-flag=-oServerAliveCountMax=4 --tunnel-through-iap '--command=mkdir -p longhaul/base-1b-12345678/incoming'
# Copy them, from the folder of this file
gcloud compute tpus queued-resources scp run.sh unpack.py code.tar.gz base-1b-12345678:longhaul/base-1b-12345678/incoming/ --zone=us-east5-b --project=my-project --quiet --node=all --worker=all --scp-flag=-oServerAliveInterval=15 --scp-flag=-oServerAliveCountMax=4 --tunnel-through-iap
# Start training
gcloud compute tpus queued-resources ssh base-1b-12345678 --zone=us-east5-b --project=my-project --quiet --node=all --worker=all --ssh-flag=-oServerAliveInterval=15 --ssh-flag=-oServerAliveCountMax=4 --tunnel-through-iap '--command=mv -f longhaul/base-1b-12345678/incoming/* longhaul/base-1b-12345678/ && bash longhaul/base-1b-12345678/run.sh start 0 1'
# Does it run?
gcloud compute tpus queued-resources ssh base-1b-12345678 --zone=us-east5-b --project=my-project --quiet --node=all --worker=all --ssh-flag=-oServerAliveInterval=15 --ssh-flag=-oServerAliveCountMax=4 --tunnel-through-iap '--command=bash longhaul/base-1b-12345678/run.sh poll 0 1'
# Let it save and stop
gcloud compute tpus queued-resources ssh base-1b-12345678 --zone=us-east5-b --project=my-project --quiet --node=all --worker=all --ssh-flag=-oServerAliveInterval=15 --ssh-flag=-oServerAliveCountMax=4 --tunnel-through-iap '--command=bash longhaul/base-1b-12345678/run.sh signal 0 1 INT'
# Delete the machines
gcloud compute tpus queued-resources delete base-1b-12345678 --zone=us-east5-b --project=my-project --quiet --force
