"""The GraphQL documents of W&B's write protocol that the sink uses, with the operation names of W&B's own client."""

from __future__ import annotations

UPSERT = """mutation UpsertBucket($id: String, $name: String, $project: String, $entity: String, $groupName: String,
  $displayName: String, $notes: String, $commit: String, $config: JSONString, $host: String, $program: String,
  $repo: String, $jobType: String, $state: String, $tags: [String!], $summaryMetrics: JSONString) {
  upsertBucket(input: {id: $id, name: $name, groupName: $groupName, modelName: $project, entityName: $entity,
    displayName: $displayName, notes: $notes, config: $config, commit: $commit, host: $host, jobProgram: $program,
    jobRepo: $repo, jobType: $jobType, state: $state, tags: $tags, summaryMetrics: $summaryMetrics}) {
    bucket { id name historyLineCount project { id name entity { id name } } } inserted } }"""

STATUS = """query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) { id name entity { id name }
    bucket(name: $name, missingOk: true) {
      id name summaryMetrics logLineCount historyLineCount eventsLineCount } } }"""

FILES = """mutation CreateRunFiles($entity: String!, $project: String!, $run: String!, $files: [String!]!) {
  createRunFiles(input: {entityName: $entity, projectName: $project, runName: $run, files: $files}) {
    runID uploadHeaders files { name uploadUrl } } }"""

CREATE_ARTIFACT = """mutation CreateArtifact($input: CreateArtifactInput!) { createArtifact(input: $input) {
    artifact { id state artifactSequence { latestArtifact { id } } } } }"""

CREATE_MANIFEST = """mutation CreateArtifactManifest($artifactID: ID!, $baseArtifactID: ID, $name: String!,
  $digest: String!, $entityName: String!, $projectName: String!, $runName: String!,
  $manifestType: ArtifactManifestType!, $includeUpload: Boolean!) {
  createArtifactManifest(input: {artifactID: $artifactID, baseArtifactID: $baseArtifactID, name: $name, digest: $digest,
    entityName: $entityName, projectName: $projectName, runName: $runName, type: $manifestType}) {
    artifactManifest { id file { id uploadUrl @include(if: $includeUpload)
      uploadHeaders @include(if: $includeUpload) } } } }"""

UPDATE_MANIFEST = """mutation UpdateArtifactManifest($artifactManifestID: ID!, $digest: String, $baseArtifactID: ID,
  $includeUpload: Boolean!) {
  updateArtifactManifest(input: {artifactManifestID: $artifactManifestID, digest: $digest,
    baseArtifactID: $baseArtifactID}) {
    artifactManifest { id file { id uploadUrl @include(if: $includeUpload)
      uploadHeaders @include(if: $includeUpload) } } } }"""

ARTIFACT_FILES = """mutation CreateArtifactFiles($input: CreateArtifactFilesInput!) {
  createArtifactFiles(input: $input) {
    files { edges { node { storagePath uploadUrl uploadHeaders artifact { id } } } } } }"""

COMMIT_ARTIFACT = """mutation CommitArtifact($artifactID: ID!) {
  commitArtifact(input: {artifactID: $artifactID}) { artifact { id digest } } }"""
